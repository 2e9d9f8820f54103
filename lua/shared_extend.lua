#!lua flags=allow-oom
--[[
shared_extend: say that a member still has messages of a shared group, so that they are not taken from it.

KEYS
  1 log_key    stream  the partition's records, with the native consumer group
  2 lock_key   hash    owner ("shared") and epoch

ARGV
  1 group      string  the native consumer group
  2 epoch      int     the epoch in force
  3 member     string  who has them
  4 ...        1 to 500 offsets

RETURNS
  {"extended", {offset, ...}}   those that others have, or that are settled; all others are this member's for another while
  {"fenced", epoch}         another epoch is in force; nothing was changed
]]
local log_key = KEYS[1]
local lock_key = KEYS[2]
local group = ARGV[1]
local epoch = tonumber(ARGV[2])
local member = ARGV[3]

local lock = redis.call('HMGET', lock_key, 'owner', 'epoch')
local held = tonumber(lock[2] or '0')
if lock[1] ~= 'shared' or held ~= epoch then return {'fenced', held} end
if #ARGV < 4 or #ARGV > 503 then return redis.error_reply('ERR shared_extend: 1 to 500 messages') end
local ids, gone = {}, {}
for i = 4, #ARGV do
  local id = ARGV[i] .. '-0'
  local pending = redis.call('XPENDING', log_key, group, id, id, 1)[1]
  if pending and pending[2] == member then ids[#ids + 1] = id else gone[#gone + 1] = tonumber(ARGV[i]) end
end
if #ids > 0 then
  ids[#ids + 1] = 'JUSTID'
  redis.call('XCLAIM', log_key, group, member, 0, unpack(ids))
end
return {'extended', gone}
