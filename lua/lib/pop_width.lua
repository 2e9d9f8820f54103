-- How many messages a call of ordered pop names at most, and how many of a queue it looks at.
local WIDTH = 500
-- How many batches are remembered of which some was given back or was not settled in its time.
local KEPT_BATCHES = 256
