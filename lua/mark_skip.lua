#!lua flags=allow-oom
--[[
mark_skip: go on behind seqs that nobody holds any more, and count them as lost.

Only where the mark is still the one that was looked at: a caller that was stopped in between must not lower what
another has raised since, nor count again.

KEYS
  1 meta_key    hash    lost: messages that were given up; lost_marks: the last seqs that are counted in it
  2 marks_key   hash    <source>:<lp> -> highest seq

ARGV
  1 field       string  <source>:<lp>
  2 after       int     the mark that was looked at, 0 for none
  3 to          int     the mark to go on from

RETURNS
  {"skipped", lost}   done; lost is how many were given up in this partition in all
  {"moved", mark}     the mark is another one; nothing was changed
]]
local meta_key = KEYS[1]
local marks_key = KEYS[2]
local field = ARGV[1]
local after = tonumber(ARGV[2])
local to = tonumber(ARGV[3])

local mark = tonumber(redis.call('HGET', marks_key, field) or '0')
if mark ~= after then return {'moved', mark} end
local meta = redis.call('HMGET', meta_key, 'lost', 'lost_marks')
local lost, lost_marks = tonumber(meta[1] or '0'), string.format('%s:%d:%d', field, after, to)
-- Counted in the command that says so: where the call ends before the mark, the next one does not count again.
if meta[2] ~= lost_marks then
  lost = lost + to - after
  redis.call('HSET', meta_key, 'lost', string.format('%d', lost), 'lost_marks', lost_marks)
end
redis.call('HSET', marks_key, field, string.format('%d', to))
return {'skipped', lost}
