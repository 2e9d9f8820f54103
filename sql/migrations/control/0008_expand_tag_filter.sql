-- Which messages a group wants, by their tags: "none" (all messages), "any:eu,vip" or "all:eu,vip".

ALTER TABLE mqlayer.consumer_group
    ADD COLUMN tag_filter text NOT NULL DEFAULT 'none',
    ADD CONSTRAINT consumer_group_tag_filter
        CHECK (tag_filter ~ '^(none|(any|all):[a-z0-9][a-z0-9_.-]*(,[a-z0-9][a-z0-9_.-]*)*)$');
