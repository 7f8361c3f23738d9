// Example questions. The demo model in models/tableqa answers the questions in DEMO correctly. TABLE is the system
// message for questions with `table`. DEMO must be JSON: a test parses it, asks the questions and checks for `answer`.

export const TABLE = `You are a helpful assistant that reads tables. Here is a table.
| ID | Name | Age | Occupation | Country |
|----|------|-----|------------|---------|
| 1 | Jane Doe | 34 | Pilot | Norway |
| 2 | Noah Rivers | 58 | Librarian | Chile |
| 3 | Vera Stone | 27 | Engineer | Ghana |
`;

const DEMO = [
  { "question": "How old is Jane Doe?", "table": true, "answer": "is 34 years old." },
  { "question": "Where is Vera Stone from?", "table": true, "answer": "is from Ghana." },
  { "question": "Give me Noah Rivers as JSON.", "table": true, "answer": "\"occupation\":\"Librarian\"" },
  { "question": "What is a block table?", "table": false, "answer": "A block table maps the logical blocks" },
  { "question": "What is TTFT?", "table": false, "answer": "TTFT is the time to first token" }
];

const GENERAL = [
  { question: "What can you help me with?" },
  { question: "Explain a hash table in three sentences." },
  { question: "Write a haiku about a busy harbour." },
];
const TEXTS = [{ question: "Once upon a time" }];

/** Return example questions for a model. `chat`: it has a chat template. */
export function examplesOf({ name, chat }) {
  if (name === "tableqa") return DEMO;
  return chat ? GENERAL : TEXTS;
}
