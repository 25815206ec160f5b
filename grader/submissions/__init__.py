"""What was handed in: folders, zips, LMS downloads, whose it is, and what is kept of it."""
