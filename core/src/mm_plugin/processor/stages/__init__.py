"""The stages of a request, one module each: a function from one typed value to the next."""
