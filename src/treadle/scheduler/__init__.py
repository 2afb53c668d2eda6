"""Which request runs next, and what a batch is made of."""
