"""The prefix caches of all workers, as the router knows them."""
