"""From a request's body to generations, and back to events."""
