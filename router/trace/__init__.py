"""Observation of requests: record of times and outcome, trace, report, causes of stalls, recent latency."""
