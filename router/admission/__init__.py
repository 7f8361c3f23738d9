"""Admission of requests: the queue of requests that wait for worker capacity, and the limits of API keys."""
