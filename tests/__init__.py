"""The tests: a package, since another one of this name in site-packages would be found first."""
