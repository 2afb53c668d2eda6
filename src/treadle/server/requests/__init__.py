"""From a request's body to generations, and from their output to events."""
