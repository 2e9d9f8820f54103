-- How many messages a call of ordered pop names at most, and how many of a queue it looks at.
local WIDTH = 500
