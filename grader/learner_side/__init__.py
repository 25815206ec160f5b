"""What is shipped into the process that runs a learner's code: these files, torch, and nothing else of the course."""
