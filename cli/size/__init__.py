"""`baton size`: how many workers a load needs, by the simulation of clusters with measured costs."""
