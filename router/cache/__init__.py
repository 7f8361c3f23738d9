"""Router's view of the prefix caches of all workers."""
