"""What all benchmarks share: statistics, pictures, the machine and its limits."""
