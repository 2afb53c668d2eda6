"""Scheduling: queueing and admission of requests, batch building, request output."""
