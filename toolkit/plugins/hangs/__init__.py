"""Who is behind in a hang: the stacks of the ranks, and scripts that report nothing, watched from outside."""
