"""Hand-overs between real engines over a matrix of what they may differ in.

`python scripts/matrix` starts a prefill and a decode engine for each case, and writes the table in
docs/compatibility.md. Cases are chosen so that every *pair* of values occurs at least once. Results
are kept, and a later run goes on where an earlier one stopped, as long as the code is the same.
"""
