"""Plain values of the router: requests, workers, events. They know no other part of it."""
