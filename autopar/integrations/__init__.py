"""What joins autopar to other libraries: a module for each, which imports it; autopar itself imports none of them."""
