"""What a job uses of its nodes, and what is wrong with them."""
