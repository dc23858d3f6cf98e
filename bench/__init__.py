"""The benchmark: contestants, how they are timed, the bars they are held to, and what is made of the results."""
