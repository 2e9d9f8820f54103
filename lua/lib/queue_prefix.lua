-- What a member of `queues` begins with. A queue may hold zero bytes, at which %s ends.
local function queue_prefix(queue) return string.format('%03d', #queue) .. queue end
