"""Jobs that outlive the loss of a node, their batch host's too."""
