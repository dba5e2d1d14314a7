"""Integrations with other libraries: one module for each, which imports it; autopar itself imports none of them."""
