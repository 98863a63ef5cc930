"""`fairlead doctor`: gather facts about Services, and name the root cause of what is wrong.

`gather` reads facts (effects), `rules` turn facts into findings (pure), `pages` describe each
finding, and `report` says what was found and what was not looked at. A new source of facts is a
field of `facts.Facts` and a function in `gather`; a new rule is a function in a module of `rules`
and a page."""
