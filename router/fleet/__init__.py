"""Router's links to the workers, and the exchange of load records with the other routers."""
