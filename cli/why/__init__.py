"""`baton why`: where the time of one request went, in three sentences and tables."""
