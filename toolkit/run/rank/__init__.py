"""What a rank does before it calls the user's code, and after."""
