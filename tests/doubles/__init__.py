"""Doubles that answer in the process of the tests: no part of the product."""
