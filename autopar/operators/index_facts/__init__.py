"""How operators propagate facts about the values at each coordinate: the `index_fact` of a row.

affine       facts: integers that are affine in the coordinates, choices between two numbers, truth values
call         an op with the facts about its operands
integers     arithmetic on whole numbers and constants
predicates   comparisons, logic, choices
views        the operand's coordinates in terms of the result's
"""
