"""What an examination found, the page that shows it, and text made fit to be shown."""
