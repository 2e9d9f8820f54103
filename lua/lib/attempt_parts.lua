-- Return how often a message was given out, ms of the first and of the last time, and how often it failed.
local function attempt_parts(noted)
  local count, first, last, failed = string.match(noted or '', '^(%d+):(%d+):(%d+):?(%d*)$')
  return tonumber(count or '0'), first, last, tonumber(failed ~= '' and failed or '0')
end
-- Return what is noted of a message that failed once more.
local function attempt_failed(noted)
  local count, first, last, failed = attempt_parts(noted)
  return string.format('%d:%s:%s:%d', count, first or '0', last or '0', failed + 1)
end
