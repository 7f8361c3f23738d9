"""Routes, one file each."""
