-- Count in the lock what a call settles unhandled because its time to live ended: first and last offset in turn.
local function expired_count(lock_key, line)
  local count = 0
  for i = 1, #line, 2 do count = count + line[i + 1] - line[i] + 1 end
  if count > 0 then redis.call('HINCRBY', lock_key, 'expired', string.format('%d', count)) end
end
