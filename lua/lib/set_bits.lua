-- Set the bits of a range of offsets in an ack bitmap.
local function set_bits(acks_key, base, first, last)
  local from, to = first - base, last - base
  while from <= to and from % 8 ~= 0 do
    redis.call('SETBIT', acks_key, from, 1)
    from = from + 1
  end
  local whole = math.floor((to - from + 1) / 8)
  if whole > 0 then
    redis.call('SETRANGE', acks_key, from / 8, string.rep('\255', whole))
    from = from + 8 * whole
  end
  while from <= to do
    redis.call('SETBIT', acks_key, from, 1)
    from = from + 1
  end
end
