"""Mixture of experts: routing, gathering rows by expert, combining results, and paging
in weights.
"""
