"""Record of each request: times, outcome, trace, report."""
