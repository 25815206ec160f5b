"""What an instructor reads or sends on: reports, similarity, exports."""
