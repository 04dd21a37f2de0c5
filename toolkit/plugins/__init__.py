"""Parts of the toolkit that a run may have or not, in one room for each subject. Each is imported where it is made."""
