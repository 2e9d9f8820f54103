-- Dead messages whose records their node lost, or that are given to a successor without it: they come again at other offsets
-- than they had, if at all.
ALTER TABLE mqlayer.dead_message ADD COLUMN adrift boolean NOT NULL DEFAULT false;
CREATE INDEX dead_message_adrift ON mqlayer.dead_message (group_id, lp) WHERE adrift;
