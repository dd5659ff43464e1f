"""What runs did: a page, the same page while they go on, and a picture of a comparison's curves."""

# One palette for pictures and page. Each colour has a contrast of at least 3:1 to the page's light and dark ground;
# any two differ by a CIEDE2000 of at least 11 in normal vision and without red, green or blue cones (Machado 2009).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#9977ff", "#776666", "#cc0033", "#bb1188")
LINES = ("-", "--", ":", "-.")  # the next style once the colours are used up
