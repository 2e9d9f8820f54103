-- Move committed over what the ack bitmap says is settled, tell the lock, then cut off what is spent of the bitmap; all of
-- it where nothing above committed is settled. Return committed.
local function committed_advance(lock_key, acks_key, committed, base, top, bits_kept)
  local KEEP_BYTES = 1024
  local spent = 0
  if bits_kept then
    -- Every bit below committed is set, so the first clear one from its byte on is the new committed.
    local clear = redis.call('BITPOS', acks_key, 0, math.floor((committed - base) / 8))
    if clear >= 0 then committed = base + clear end
    if committed >= top then
      base = committed
      top = 0
    else
      spent = math.floor((committed - base) / 8)
      if spent <= KEEP_BYTES then spent = 0 end
      base = base + 8 * spent
    end
  end
  redis.call('HSET', lock_key, 'committed', string.format('%d', committed), 'base', string.format('%d', base),
    'top', string.format('%d', top))
  if bits_kept and top == 0 then
    redis.call('DEL', acks_key)
  elseif spent > 0 then
    redis.call('SET', acks_key, redis.call('GETRANGE', acks_key, spent, -1))
  end
  return committed
end
