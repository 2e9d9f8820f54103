#!lua flags=allow-oom
--[[
shared_due: give a member messages of a shared group that are due again: failed ones after their wait, given back ones,
and those whose member was not heard of (see shared_reclaim).

KEYS
  1 log_key       stream  the partition's records, with the native consumer group
  2 lock_key      hash    owner ("shared") and epoch
  3 attempts_key  hash    offset -> failed attempts and when (see shared_nack)
  4 due_key       zset    offset -> ms when it may be given again

ARGV
  1 group         string  the native consumer group
  2 epoch         int     the epoch in force
  3 member        string  who is to have them
  4 limit         int     1 to 500 messages

RETURNS
  {"due", {entry, ...}, {attempts, ...}, {offset, ...}}
                      entries as streams give them; what is noted of each one, '' for nothing; and what was due and is
                      not there, since it is settled, or somebody removed it from the stream: to be settled
  {"fenced", epoch}   another epoch is in force; nothing was changed
]]
local log_key = KEYS[1]
local lock_key = KEYS[2]
local attempts_key = KEYS[3]
local due_key = KEYS[4]
local group = ARGV[1]
local epoch = tonumber(ARGV[2])
local member = ARGV[3]
local limit = tonumber(ARGV[4])

-- include due_claim

local lock = redis.call('HMGET', lock_key, 'owner', 'epoch')
local held = tonumber(lock[2] or '0')
if lock[1] ~= 'shared' or held ~= epoch then return {'fenced', held} end
if limit < 1 or limit > 500 then return redis.error_reply('ERR shared_due: 1 to 500 messages') end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local due = redis.call('ZRANGEBYSCORE', due_key, '-inf', string.format('%d', now), 'LIMIT', 0, limit)
if #due == 0 then return {'due', {}, {}, {}} end
local entries, notes, missing = due_claim(log_key, attempts_key, due_key, group, member, due)
return {'due', entries, notes, missing}
