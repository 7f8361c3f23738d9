// Questions to begin with, which the demo model in models/tableqa answers right. A question about the table is asked
// with it as the system message. The list is JSON: a test asks the model each
// question, and looks for `answer` in its answer.

export const TABLE = `You are a helpful assistant that reads tables. Here is a table.
| ID | Name | Age | Occupation | Country |
|----|------|-----|------------|---------|
| 1 | Jane Doe | 34 | Pilot | Norway |
| 2 | Noah Rivers | 58 | Librarian | Chile |
| 3 | Vera Stone | 27 | Engineer | Ghana |
`;

export const EXAMPLES = [
  { "question": "How old is Jane Doe?", "table": true, "answer": "is 34 years old." },
  { "question": "Where is Vera Stone from?", "table": true, "answer": "is from Ghana." },
  { "question": "Give me Noah Rivers as JSON.", "table": true, "answer": "\"occupation\":\"Librarian\"" },
  { "question": "What is a block table?", "table": false, "answer": "A block table maps the logical blocks" },
  { "question": "What is TTFT?", "table": false, "answer": "TTFT is the time to first token" }
];
