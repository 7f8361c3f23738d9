"""Plain value classes of the router: requests, workers, events. They import no other package of the router."""
