-- Return a function that says of an offset from `first` to `last` whether it is settled, by one read of the ack bitmap.
local function settled_in(acks_key, committed, base, top, first, last)
  if top <= committed or last < committed then return function(offset) return offset < committed end end
  local from = math.floor((math.max(first, committed) - base) / 8)
  local bytes = redis.call('GETRANGE', acks_key, from, math.floor((last - base) / 8))
  return function(offset)
    if offset < committed then return true end
    local bit = offset - base
    local byte = string.byte(bytes, math.floor(bit / 8) - from + 1) or 0
    return math.floor(byte / 2 ^ (7 - bit % 8)) % 2 == 1
  end
end
