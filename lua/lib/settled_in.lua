-- Return a function that says of these offsets which are settled, by one read of the ack bitmap.
local function settled_in(acks_key, committed, base, top, offsets)
  local first, last = offsets[1], offsets[1]
  for i = 2, top > committed and #offsets or 0 do first, last = math.min(first, offsets[i]), math.max(last, offsets[i]) end
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
