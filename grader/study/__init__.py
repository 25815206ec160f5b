"""A learner's own course: the workspace, checks of labs, progress."""
