"""What every process takes from the machine it runs on: files that others wrote, and memory."""
