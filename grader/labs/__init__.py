"""What a lab is: its cells, its source, its two notebooks, its conventions."""
