"""A cluster of so many workers under a load, in virtual time: the real router and workers, with measured step costs."""
