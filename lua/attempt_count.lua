#!lua flags=allow-oom
--[[
attempt_count: count one more failed attempt of a message.

KEYS
  1 lock_key      hash    owner, epoch, last refresh, committed, base of the ack bitmap
  2 attempts_key  hash    offset -> failed attempts

ARGV
  1 member        string  who asks
  2 epoch         int     fencing epoch of its assignment
  3 offset        int     the message

RETURNS
  {"counted", attempts}   failed attempts of the message so far
  {"fenced", epoch}       another epoch is in force; nothing was changed
]]
local lock_key = KEYS[1]
local attempts_key = KEYS[2]
local member = ARGV[1]
local epoch = tonumber(ARGV[2])
local offset = ARGV[3]

local lock = redis.call('HMGET', lock_key, 'owner', 'epoch')
local held = tonumber(lock[2] or '0')
if lock[1] ~= member or held ~= epoch then return {'fenced', held} end
return {'counted', redis.call('HINCRBY', attempts_key, offset, 1)}
